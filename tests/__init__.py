"""All tests; the folders mirror the packages. A package itself, so that tests/api never stands in for api."""
