"""What the launchers see of torch, for tests: a torchrun that starts in no time."""
