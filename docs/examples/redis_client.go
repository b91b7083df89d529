// A request over Redis, by the standard library alone: go run redis_client.go
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// reply reads a reply; the strings of arrays are joined to one list.
func reply(server *bufio.Reader) (found []string) {
	line := must(server.ReadString('\n'))
	size, _ := strconv.Atoi(strings.TrimSpace(line[1:]))
	switch {
	case line[0] == '-':
		panic(line)
	case line[0] == '*':
		for ; size > 0; size-- {
			found = append(found, reply(server)...)
		}
	case line[0] == '$' && size >= 0:
		text := make([]byte, size+2)
		must(io.ReadFull(server, text))
		found = []string{string(text[:size])}
	}
	return found
}

func main() {
	place := must(url.Parse(os.Getenv("REDIS_URL"))) // redis://:PASSWORD@HOST:PORT
	server := must(net.Dial("tcp", place.Host))
	from := bufio.NewReader(server)
	command := func(words ...string) []string {
		sent := fmt.Sprintf("*%d\r\n", len(words))
		for _, word := range words {
			sent += fmt.Sprintf("$%d\r\n%s\r\n", len(word), word)
		}
		must(server.Write([]byte(sent)))
		return reply(from)
	}
	if password, given := place.User.Password(); given {
		command("AUTH", password)
	}
	request := `{"prompt": "98 + 25 =", "sampling": {"temperature": 0}, "stream": false}`
	out := "nano:out:" + command("XADD", "nano:requests", "*", "json", request)[0]
	found := []string{}
	for len(found) == 0 {
		found = command("XREAD", "COUNT", "1", "BLOCK", "5000", "STREAMS", out, "0")
	}
	fmt.Println(found[3]) // without a stream the completion is the only output
}
