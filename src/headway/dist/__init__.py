"""Join: who am I, who are we? Launcher detection, process group, safe root-only work, topology."""
