"""Contains all code that uses DeepSpeed: engines for ZeRO, options, patches, and state files of shards."""
