"""Work that ranks do together: guarded sections, averages, and the exchange of small objects."""
