"""One file per measured thing; each probe declares its columns and turns events into cells."""
