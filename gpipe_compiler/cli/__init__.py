"""The commands gpipe-compile and gpipe-inspect."""
