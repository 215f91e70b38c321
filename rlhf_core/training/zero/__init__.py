"""Everything that touches DeepSpeed: engines under ZeRO, options, patches, and state files of shards."""
