# SPDX-License-Identifier: Apache-2.0
"""The interfaces of other systems, with their names, parameters and defaults."""
