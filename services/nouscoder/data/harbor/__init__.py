"""Harbor's task folders: how problems become folders, and the programs that run in Harbor's and in our sandboxes."""
