"""`batchrun serve`: OpenAI's Files and Batches API on your own engine.

state: files and batches on the disk. owners: API keys, shares and limits. batches: runs batches on one
engine. activity: running batches and load for the page (page.html, page.css, page.js). files_api,
batches_api, metrics_api, page_api, records: the HTTP calls. server: all calls as one application, and the
server's life from start to end. The package is imported only by the command.
"""
