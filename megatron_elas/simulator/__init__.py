"""A job over days of failures, simulated: pure, seeded, without a clock. Values in, an outcome out. No torch."""
