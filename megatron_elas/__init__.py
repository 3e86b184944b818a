"""ElasWave for Megatron-LM: training that goes on when workers die. Importing changes nothing."""

__version__ = "0.1.0"


def install() -> None:
    """Make the Megatron script that calls this elastic, if its command line has a flag ``--elastic``.

    For Megatron's own pretrain_gpt.py, before it imports torch and Megatron; ``elas patch`` puts the call there.
    Without such a flag nothing is imported and nothing changes.
    """
    import sys

    if any(word.startswith("--elastic") for word in sys.argv[1:]):
        from megatron_elas import own_script

        own_script.attach()
