"""A pipeline rank at work: the runtime of action lists, its stages, split backwards, offloading, and their timeline."""
