"""The only code that imports megatron."""
