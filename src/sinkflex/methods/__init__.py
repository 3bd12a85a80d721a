"""Methods: one paper, one small file over one loop."""
