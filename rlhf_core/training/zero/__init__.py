"""Everything that touches DeepSpeed: engines for ZeRO, options, patches, and state files of shards."""
