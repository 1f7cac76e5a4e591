"""`halfmatch measure`: the mismatch of one model on one engine, without a configuration and without Snakemake."""
