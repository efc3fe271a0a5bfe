"""Pictures and pages made from records of `flashmoe bench`.

`record` reads them and says in words what a table, a chart and a page all say; `charts` draws them
in the looks of `theme`; `page` puts them, with tables and environment, into one HTML file.
"""
