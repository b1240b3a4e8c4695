"""A job under preemptions, simulated: to compare policies, and to say what a run needs."""
