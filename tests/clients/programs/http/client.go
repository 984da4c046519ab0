// http.DefaultClient of Go as it comes: HTTP/2 over TLS where the server has it.
package main

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"strings"
)

func lines(response *http.Response, err error) string {
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	found := []string{fmt.Sprint(response.StatusCode)}
	scanner := bufio.NewScanner(response.Body)
	scanner.Buffer(nil, 64<<20)
	for scanner.Scan() {
		if line := scanner.Text(); line != "" {
			found = append(found, line[:min(300, len(line))])
		}
	}
	if scanner.Err() != nil {
		found = append(found, scanner.Err().Error())
	}
	return strings.Join(found, " ")
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

func post(path string, variable string) string {
	file, err := os.Open(os.Getenv(variable))
	if err != nil {
		panic(err)
	}
	return lines(http.Post(os.Getenv("PDSERVE_URL")+path, "application/json", file))
}

func main() {
	fmt.Println("models", lines(http.Get(os.Getenv("PDSERVE_URL")+"/v1/models"))[:3])
	fmt.Println("upload", post("/tokenize", "UPLOAD"))
	fmt.Println("stream", post("/v1/completions", "STREAM"))
	fmt.Println("again", post("/v1/completions", "BRIEF"))
}
