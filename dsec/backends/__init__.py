"""Ways to run sandboxes, one module each, all behind `dsec.backends.base`. Nothing is loaded here: the holder imports this package."""
