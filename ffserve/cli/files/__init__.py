"""Commands that take record files: to read, check, make, convert, fetch and mount them."""
