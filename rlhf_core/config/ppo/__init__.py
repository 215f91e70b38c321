"""Fields of PPO and its critic-free relatives, in groups. Torch-free.

A file holds the fields of one group, the checks that read them, and the values derived from them. A group
that reads another group's fields is a subclass of it. `ppo_config` combines all groups and holds the checks
across them."""
