// java.net.http.HttpClient as it comes: over plain HTTP it offers an upgrade to HTTP/2, over TLS it negotiates HTTP/2.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Collectors;

public class Client {
    private static final HttpClient client = HttpClient.newHttpClient();
    private static final String url = System.getenv("PDSERVE_URL");

    public static void main(String[] args) throws Exception {
        HttpRequest models = HttpRequest.newBuilder(URI.create(url + "/v1/models")).build();
        System.out.println("models " + client.send(models, HttpResponse.BodyHandlers.ofString()).statusCode());
        System.out.println("upload " + post("/tokenize", System.getenv("UPLOAD")));
        System.out.println("stream " + post("/v1/completions", System.getenv("STREAM")));
        System.out.println("again " + post("/v1/completions", System.getenv("BRIEF")));
    }

    private static String post(String path, String file) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + path))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofFile(java.nio.file.Path.of(file)))
            .build();
        HttpResponse<java.util.stream.Stream<String>> response = client.send(request, HttpResponse.BodyHandlers.ofLines());
        return response.statusCode() + " " + response.body().map(line -> line.length() > 300 ? line.substring(0, 300) : line)
            .filter(line -> !line.isEmpty()).collect(Collectors.joining(" "));
    }
}
