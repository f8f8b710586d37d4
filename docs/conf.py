# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# `make docs`: these pages as HTML, and those for who runs migr as manual pages, migr-*(7).
project = "migr"
author = "the migr authors"
extensions = ["myst_parser"]
root_doc = "index"
html_theme = "alabaster"
html_theme_options = {"page_width": "70em", "sidebar_width": "14em"}
html_copy_source = False
html_show_copyright = False
exclude_patterns = ["man"]
# Pages also link to files of the tree that are no pages: tests/docs/commands_test looks whether these are there.
suppress_warnings = ["ref.myst", "misc.highlighting_failure"]

man_pages = [
    (page, f"migr-{page}", title, author, "7")
    for page, title in {
        "getting-started": "from packages to a container that has moved",
        "operations": "running hosts with migr",
        "limits": "what does not work, or is not promised",
        "failover": "going on over another NIC",
        "threat-model": "who is trusted with what",
    }.items()
]
