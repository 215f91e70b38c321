"""The fields of PPO and its critic-free relatives, in groups: a file holds the fields of one group, the
checks that read them, and what follows from them. A group that reads fields of another is a subclass of it.
`ppo_config` puts all groups together and has the checks across them. Torch-free."""
