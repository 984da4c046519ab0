# curl --http2: an upgrade over plain HTTP, negotiated over TLS. It waits for `100 Continue` before large bodies.
post() {
  curl -sS --http2 -N --cacert "$AUTHORITY" -w ' %{http_code} over %{http_version}' -H 'Content-Type: application/json' \
    --data-binary "@$2" "$PDSERVE_URL$1" | cut -c 1-300 | tr '\n' ' '
}
echo "models $(curl -sS --http2 --cacert "$AUTHORITY" -o /dev/null -w '%{http_code}' "$PDSERVE_URL/v1/models")"
echo "upload $(post /tokenize "$UPLOAD")"
echo "stream $(post /v1/completions "$STREAM")"
echo "again $(post /v1/completions "$BRIEF")"
