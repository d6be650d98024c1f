# SPDX-License-Identifier: Apache-2.0
"""`python -m muster.compat SCRIPT ...`: runs a script with the original modules replaced."""

import os

from .. import _hook

if __name__ == "__main__":
    # Ranks that the script starts inherit the variable. The package has read it if it was already set.
    if not os.environ.get("MUSTER_COMPAT"):
        os.environ["MUSTER_COMPAT"] = "1"
        from . import install

        install()
    _hook.run_script("muster.compat")
