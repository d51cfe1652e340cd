"""What the accuracy benches stand on: CIFAR-10, kept results, the arms."""
