"""From labelled arrays to figures and one page: `page.write_report`, `look.draw_look`, and the style both share.

Nothing is imported here: the probes' drawings use `report.style`, and the page uses the probes' drawings.
"""
