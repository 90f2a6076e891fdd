"""An HTTP server that speaks OpenAI's protocol; needs the extra `serve`."""
