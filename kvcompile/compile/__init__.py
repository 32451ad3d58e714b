"""From a cached graph to something that runs: regions, Inductor, the executor."""
