"""Pure planning: values in, a plan out. No torch."""
