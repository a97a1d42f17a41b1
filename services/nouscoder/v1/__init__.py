"""Generated from proto/nouscoder/v1 by `make proto`."""
