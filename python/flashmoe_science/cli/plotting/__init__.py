"""Pictures and pages made from records of `flashmoe bench`.

`record` reads them and says in words what a table, a chart and a page all say. `speed` and `ratio`
draw on the `sheet` in the colours of `theme`; `charts` lists the pictures and writes one. `page`
puts them, with tables and environment, into one HTML file.
"""
