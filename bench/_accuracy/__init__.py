"""Parts of the accuracy benches: CIFAR-10, kept results, the arms."""
