"""Distribution of datasets among workers, and checks that all read the same data."""
