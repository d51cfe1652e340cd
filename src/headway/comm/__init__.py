"""How devices meet: hosts and links, algorithms, the Reducer, who is alive, and the Horovod names."""
