/*
 * An S3 endpoint that keeps nothing: what is sent is read and thrown away, what is fetched is zeros.
 * It costs so little that what one sees is the client. It listens on 127.0.0.1 only.
 *
 *   gcc -O2 -pthread sink.c -lssl -lcrypto -o sink
 *   sink PORT COUNT SIZE [CERT KEY]    COUNT objects k/000000.pt, k/000001.pt, ... of SIZE bytes can
 *                                      be fetched from any bucket; with CERT and KEY (PEM): TLS
 *
 * It prints "ready" once it listens. GET /-/received answers how many bytes of objects it
 * took in requests that it read to their end: framing (aws-chunked, HTTP chunks) is not counted.
 * It remembers keys and sizes of what was sent, so that HEAD answers. It checks no signature, no
 * checksum and no part list: it is no S3 to test against.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PIECE = 1 << 20, HEAD = 1 << 16, BUCKETS = 4096, PAGE = 1000 };

#define ETAG "\"00000000000000000000000000000000-1\""
#define DATE "Mon, 01 Jan 2024 00:00:00 GMT"

/* ---- what was sent: key -> size */

struct object {
    char *key;
    long size;
    struct object *next;
};
static struct object *table[BUCKETS];
static long received;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long object_count, object_size;
static SSL_CTX *tls;
static char zeros[PIECE];

static struct object *find(const char *key, int make) {
    unsigned hash = 5381;
    for (const char *c = key; *c; c++) hash = hash * 33 + (unsigned char)*c;
    struct object **slot = &table[hash % BUCKETS];
    for (struct object *each = *slot; each; each = each->next)
        if (!strcmp(each->key, key)) return each;
    if (!make) return NULL;
    struct object *new = calloc(1, sizeof *new);
    new->key = strdup(key);
    new->next = *slot;
    return *slot = new;
}

/* Parts add up; a whole object replaces. A part that is sent twice would count twice. */
static void remember(const char *key, long size, int part) {
    pthread_mutex_lock(&lock);
    struct object *object = find(key, 1);
    object->size = part ? object->size + size : size;
    received += size;
    pthread_mutex_unlock(&lock);
}

/* Size of an object, or -1. A path is /bucket/key. */
static long size_of(const char *path) {
    pthread_mutex_lock(&lock);
    struct object *object = find(path, 0);
    long size = object ? object->size : -1;
    pthread_mutex_unlock(&lock);
    if (size >= 0) return size;
    const char *key = strchr(path + 1, '/');
    long number;
    int end = 0;
    if (key && sscanf(key, "/k/%ld.pt%n", &number, &end) == 1 && end && !key[end] &&
        number >= 0 && number < object_count)
        return object_size;
    return -1;
}

/* ---- one connection */

struct connection {
    int socket;
    SSL *ssl;
    char head[HEAD]; /* what was read and not yet used */
    size_t have;
    char *piece;
};

struct request {
    char method[16], path[8192], query[8192];
    long length, decoded, first, last;
    int chunked, expects;
};

static ssize_t receive(struct connection *c, void *to, size_t size) {
    if (!c->ssl) return recv(c->socket, to, size, 0);
    return SSL_read(c->ssl, to, size > PIECE ? PIECE : (int)size);
}

static int answer(struct connection *c, const char *from, size_t size) {
    while (size) {
        ssize_t sent = c->ssl ? SSL_write(c->ssl, from, size > PIECE ? PIECE : (int)size)
                              : send(c->socket, from, size, MSG_NOSIGNAL);
        if (sent <= 0) return -1;
        from += sent;
        size -= sent;
    }
    return 0;
}

/* A whole answer with a short body. */
static int reply(struct connection *c, const char *status, const char *headers, const char *body) {
    char head[1024];
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %s\r\nContent-Length: %zu\r\nContent-Type: application/xml\r\n"
                        "x-amz-request-id: 1\r\n%s\r\n",
                        status, strlen(body), headers);
    return answer(c, head, size) || answer(c, body, strlen(body)) ? -1 : 0;
}

static int discard(struct connection *c, long left) {
    size_t used = (long)c->have < left ? c->have : (size_t)left;
    memmove(c->head, c->head + used, c->have -= used);
    left -= used;
    while (left > 0) {
        ssize_t got = receive(c, c->piece, left < PIECE ? left : PIECE);
        if (got <= 0) return -1;
        left -= got;
    }
    return 0;
}

/* Make sure that a text stands in what was read; returns the bytes up to its end, or -1. */
static long up_to(struct connection *c, const char *text) {
    for (;;) {
        char *end = memmem(c->head, c->have, text, strlen(text));
        if (end) return end - c->head + strlen(text);
        if (c->have == HEAD) return -1;
        ssize_t got = receive(c, c->head + c->have, HEAD - c->have);
        if (got <= 0) return -1;
        c->have += got;
    }
}

/* A body in HTTP chunks; returns its bytes, or -1. */
static long discard_chunks(struct connection *c) {
    for (long total = 0;;) {
        long line = up_to(c, "\r\n");
        if (line < 0) return -1;
        long size = strtol(c->head, NULL, 16);
        if (discard(c, line)) return -1;
        if (size == 0) { /* trailers, then an empty line */
            while ((line = up_to(c, "\r\n")) > 2)
                if (discard(c, line)) return -1;
            return line < 0 || discard(c, line) ? -1 : total;
        }
        if (discard(c, size + 2)) return -1;
        total += size;
    }
}

static int read_head(struct connection *c, struct request *r) {
    long size = up_to(c, "\r\n\r\n");
    if (size < 0) return -1;
    c->head[size - 1] = 0;
    char target[8192];
    memset(r, 0, sizeof *r);
    r->decoded = r->first = r->last = -1;
    if (sscanf(c->head, "%15s %8191s", r->method, target) != 2) return -1;
    char *query = strchr(target, '?');
    if (query) {
        *query = 0;
        strcpy(r->query, query + 1);
    }
    strcpy(r->path, target);
    for (char *line = strstr(c->head, "\r\n"); line; line = strstr(line, "\r\n")) {
        line += 2;
        if (!strncasecmp(line, "content-length:", 15)) r->length = atol(line + 15);
        if (!strncasecmp(line, "x-amz-decoded-content-length:", 29)) r->decoded = atol(line + 29);
        if (!strncasecmp(line, "transfer-encoding: chunked", 26)) r->chunked = 1;
        if (!strncasecmp(line, "expect:", 7)) r->expects = 1;
        if (!strncasecmp(line, "range:", 6)) sscanf(line + 6, " bytes=%ld-%ld", &r->first, &r->last);
    }
    memmove(c->head, c->head + size, c->have -= size);
    return 0;
}

static int has(const struct request *r, const char *name) {
    size_t size = strlen(name);
    for (const char *at = r->query; at && *at; at = strchr(at, '&')) {
        if (*at == '&') at++;
        if (!strncmp(at, name, size) && strchr("=&", at[size])) return 1; /* strchr finds the 0 */
    }
    return 0;
}

static int send_object(struct connection *c, const struct request *r) {
    long size = size_of(r->path);
    int with_body = !strcmp(r->method, "GET");
    if (size < 0)
        return reply(c, "404 Not Found", "",
                     with_body ? "<?xml version=\"1.0\"?><Error><Code>NoSuchKey</Code></Error>" : "");
    char head[1024], range[128] = "";
    long left = size, last = r->last < 0 || r->last >= size ? size - 1 : r->last;
    if (r->first >= 0 && r->first < size) {
        left = last - r->first + 1;
        snprintf(range, sizeof range, "Content-Range: bytes %ld-%ld/%ld\r\n", r->first, last, size);
    }
    int length = snprintf(head, sizeof head,
                          "HTTP/1.1 %s\r\nContent-Length: %ld\r\n%sETag: " ETAG
                          "\r\nLast-Modified: " DATE "\r\nAccept-Ranges: bytes\r\n"
                          "Content-Type: binary/octet-stream\r\nx-amz-request-id: 1\r\n\r\n",
                          *range ? "206 Partial Content" : "200 OK", left, range);
    if (answer(c, head, length)) return -1;
    while (with_body && left > 0) {
        long size_now = left < PIECE ? left : PIECE;
        if (answer(c, zeros, size_now)) return -1;
        left -= size_now;
    }
    return 0;
}

/* Either list call; the token of a page is the number that it begins with. */
static int send_list(struct connection *c, const struct request *r) {
    long from = 0, count;
    const char *token = strstr(r->query, "continuation-token=");
    if (token) from = atol(token + strlen("continuation-token="));
    const char *marker = strstr(r->query, "marker=k%2F");
    if (marker && !token) from = atol(marker + strlen("marker=k%2F")) + 1;
    count = object_count - from < PAGE ? object_count - from : PAGE;
    char *body = malloc(1024 + 512 * PAGE);
    int more = from + count < object_count;
    int used = sprintf(body,
                       "<?xml version=\"1.0\"?><ListBucketResult><Name>bench</Name>"
                       "<Prefix>k/</Prefix><MaxKeys>%d</MaxKeys><KeyCount>%ld</KeyCount>"
                       "<IsTruncated>%s</IsTruncated>",
                       PAGE, count, more ? "true" : "false");
    if (more)
        used += sprintf(body + used, "<NextContinuationToken>%ld</NextContinuationToken>",
                        from + count);
    for (long number = from; number < from + count; number++)
        used += sprintf(body + used,
                        "<Contents><Key>k/%06ld.pt</Key><Size>%ld</Size><ETag>" ETAG
                        "</ETag><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
                        "<StorageClass>STANDARD</StorageClass></Contents>",
                        number, object_size);
    strcpy(body + used, "</ListBucketResult>");
    int result = reply(c, "200 OK", "", body);
    free(body);
    return result;
}

static int serve_request(struct connection *c, const struct request *r) {
    if (r->expects && answer(c, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return -1;
    long size = r->length;
    if (r->chunked) {
        if ((size = discard_chunks(c)) < 0) return -1;
    } else if (discard(c, size)) {
        return -1;
    }
    if (r->decoded >= 0) size = r->decoded;
    const char *key = strchr(r->path + 1, '/');
    int of_object = key && key[1];
    if (!strcmp(r->path, "/-/received")) {
        char text[32];
        pthread_mutex_lock(&lock);
        snprintf(text, sizeof text, "%ld", received);
        pthread_mutex_unlock(&lock);
        return reply(c, "200 OK", "", text);
    }
    if (!strcmp(r->method, "PUT")) {
        if (of_object) remember(r->path, size, has(r, "partNumber"));
        return reply(c, "200 OK", "ETag: " ETAG "\r\n", "");
    }
    if (!strcmp(r->method, "POST") && has(r, "uploads"))
        return reply(c, "200 OK", "",
                     "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Bucket>bench</Bucket>"
                     "<Key>k</Key><UploadId>u1</UploadId></InitiateMultipartUploadResult>");
    if (!strcmp(r->method, "POST") && has(r, "uploadId"))
        return reply(c, "200 OK", "",
                     "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><Location>l</Location>"
                     "<Bucket>bench</Bucket><Key>k</Key><ETag>" ETAG
                     "</ETag></CompleteMultipartUploadResult>");
    if (!strcmp(r->method, "DELETE")) return reply(c, "204 No Content", "", "");
    if (!strcmp(r->method, "GET") && has(r, "location"))
        return reply(c, "200 OK", "", "<?xml version=\"1.0\"?><LocationConstraint/>");
    if (!strcmp(r->method, "GET") && !of_object) return send_list(c, r);
    if (!strcmp(r->method, "HEAD") && !of_object) return reply(c, "200 OK", "", "");
    if (!strcmp(r->method, "GET") || !strcmp(r->method, "HEAD")) return send_object(c, r);
    return reply(c, "501 Not Implemented", "", "");
}

static void *serve(void *argument) {
    struct connection *c = calloc(1, sizeof *c);
    struct request *r = malloc(sizeof *r);
    int on = 1;
    c->socket = (int)(long)argument;
    c->piece = malloc(PIECE);
    setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (tls) {
        c->ssl = SSL_new(tls);
        SSL_set_fd(c->ssl, c->socket);
    }
    if (!tls || SSL_accept(c->ssl) > 0)
        while (!read_head(c, r) && !serve_request(c, r)) continue;
    if (c->ssl) SSL_free(c->ssl);
    close(c->socket);
    free(c->piece);
    free(c);
    free(r);
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 4 && count != 6) {
        fprintf(stderr, "usage: sink PORT COUNT SIZE [CERT KEY]\n");
        return 2;
    }
    object_count = atol(arguments[2]);
    object_size = atol(arguments[3]);
    signal(SIGPIPE, SIG_IGN);
    if (count == 6) {
        tls = SSL_CTX_new(TLS_server_method());
        if (SSL_CTX_use_certificate_chain_file(tls, arguments[4]) != 1 ||
            SSL_CTX_use_PrivateKey_file(tls, arguments[5], SSL_FILETYPE_PEM) != 1) {
            fprintf(stderr, "sink: the certificate or the key cannot be used\n");
            return 1;
        }
    }
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(atoi(arguments[1])),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 512)) {
        perror("sink");
        return 1;
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        int accepted = accept(listener, NULL, NULL);
        pthread_t thread;
        if (accepted < 0) continue;
        if (pthread_create(&thread, NULL, serve, (void *)(long)accepted))
            close(accepted);
        else
            pthread_detach(thread);
    }
}
