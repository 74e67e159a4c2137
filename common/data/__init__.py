"""Examples from files, folders, tables and named data sets. It knows neither tasks nor networks."""
