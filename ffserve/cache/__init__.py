"""The cache: slots of the arena, the shared tables, and the policy of eviction over both."""
