"""Device platforms. platform/cpu lets Megatron train without an accelerator."""
