"""What runs inside a worker, without knowing Megatron."""
