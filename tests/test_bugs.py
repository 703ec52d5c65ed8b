"""One test per reported bug, named after what went wrong; it fails without the mend, and stays for good.

A bug found while building belongs in the module's own tests; one that a user met belongs here, with the input that
showed it, as small as it goes.
"""
