"""Channels of the transport that are no group's: each has links of its own, so none waits behind another."""

from megatron_elas.runtime.communicator.channels import FIRST_FREE

SNAPSHOTS = FIRST_FREE
"""Each step's shards, on their way to backups."""
MIGRATION = FIRST_FREE + 1
"""Shards on their way to new owners."""
PIPELINE = FIRST_FREE + 2
"""Activations and their gradients."""
TIED_GRADIENTS = FIRST_FREE + 3
"""Gradients of a tied embedding, between the first and the last stage."""
