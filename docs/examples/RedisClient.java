// A request over Redis, by the standard library alone: java RedisClient.java
import java.io.*;
import java.net.*;
import java.nio.charset.StandardCharsets;
import java.util.*;

public class RedisClient {
    static DataInputStream in;
    static OutputStream out;

    /** Reads a reply into `found`; the strings of arrays are joined to one list. */
    static void reply(List<String> found) throws IOException {
        var line = new StringBuilder();
        for (int each = in.readByte(); each != '\n'; each = in.readByte()) line.append((char) each);
        var rest = line.substring(1).trim();
        switch (line.charAt(0)) {
            case '-' -> throw new IOException(rest);
            case '*' -> { for (int n = Integer.parseInt(rest); n > 0; n--) reply(found); }
            case '$' -> {
                int size = Integer.parseInt(rest);
                if (size < 0) return;
                found.add(new String(in.readNBytes(size), StandardCharsets.UTF_8));
                in.skipNBytes(2);
            }
        }
    }

    static List<String> command(String... words) throws IOException {
        var sent = new ByteArrayOutputStream();
        sent.writeBytes(("*" + words.length + "\r\n").getBytes());
        for (var word : words) {
            var text = word.getBytes(StandardCharsets.UTF_8);
            sent.writeBytes(("$" + text.length + "\r\n").getBytes());
            sent.writeBytes(text);
            sent.writeBytes("\r\n".getBytes());
        }
        out.write(sent.toByteArray());
        var found = new ArrayList<String>();
        reply(found);
        return found;
    }

    public static void main(String[] arguments) throws Exception {
        var place = new URI(System.getenv("REDIS_URL")); // redis://:PASSWORD@HOST:PORT
        var server = new Socket(place.getHost(), place.getPort());
        in = new DataInputStream(new BufferedInputStream(server.getInputStream()));
        out = server.getOutputStream();
        if (place.getUserInfo() != null) command("AUTH", place.getUserInfo().split(":", 2)[1]);
        var request = "{\"prompt\": \"98 + 25 =\", \"sampling\": {\"temperature\": 0}, \"stream\": false}";
        var id = command("XADD", "nano:requests", "*", "json", request).get(0);
        List<String> found = List.of();
        while (found.isEmpty())
            found = command("XREAD", "COUNT", "1", "BLOCK", "5000", "STREAMS", "nano:out:" + id, "0");
        System.out.println(found.get(3)); // without a stream the completion is the only output
    }
}
