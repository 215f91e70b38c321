"""Protection for servers of local pages: tokens, the files that hold them, and the form that asks for one."""
