"""Files: the open files of the daemon, who may read them, and checks of their content."""
