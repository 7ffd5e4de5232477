"""What stays in memory: slots of the arena, the shared tables, and the policy over both."""
