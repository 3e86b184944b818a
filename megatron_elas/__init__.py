"""ElasWave for Megatron-LM: training that goes on when workers die. Importing changes nothing."""

__version__ = "0.1.0"
