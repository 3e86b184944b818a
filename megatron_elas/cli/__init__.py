"""Command lines. Where they cannot run, importing them ends the process with one sentence."""

from megatron_elas.prerequisites import exit_without_prerequisites

exit_without_prerequisites("msgspec", "psutil", "websockets")
