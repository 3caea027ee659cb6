"""Programs that use this project as a user would; `python -m examples.demo` is the main one."""
