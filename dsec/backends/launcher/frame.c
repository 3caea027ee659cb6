/* From the bytes of a frame to an order. Pure: no system call, nothing is allocated; whatever the bytes are, nothing outside of
 * them is read. Layout (the machine's own byte order, for a frame never leaves it):
 *
 *   u32 magic, u16 version, u16 sections, u32 size of all, u32 0      then each section: u16 tag, u16 0, u32 length, bytes
 *
 * A text ends with its NUL, which counts. */
#include "launcher.h"
#include <string.h>

struct reader {
    const uint8_t *at, *end;
    const char **field, **why;
};

static const char *const names[TAG_END] = {
    [TAG_LOWERS] = "lowers", [TAG_IDS] = "ids", [TAG_UPPER] = "upper", [TAG_NAMESPACES] = "namespaces", [TAG_HOSTNAME] = "hostname",
    [TAG_ARGV] = "argv", [TAG_ENV] = "env", [TAG_MOUNT] = "mounts", [TAG_NODES] = "nodes", [TAG_LINKS] = "links", [TAG_MASKED] = "masked",
    [TAG_READONLY] = "readonly", [TAG_GROUPS] = "groups", [TAG_GROUP2] = "group2", [TAG_RLIMIT] = "rlimits", [TAG_CAPS] = "caps",
    [TAG_NO_NEW_PRIVS] = "no_new_privs", [TAG_SECCOMP] = "seccomp", [TAG_OOM] = "oom",
    [TAG_MADE] = "made", [TAG_SETTINGS] = "settings", [TAG_SOCKET] = "socket",
};

static bool refuse(struct reader *r, const char *field, const char *why) {
    *r->field = field;
    *r->why = why;
    return false;
}

static bool take(struct reader *r, void *to, size_t size) {
    if ((size_t)(r->end - r->at) < size) return false;
    memcpy(to, r->at, size);
    r->at += size;
    return true;
}

static const char *take_text(struct reader *r) {
    const uint8_t *nul = memchr(r->at, 0, (size_t)(r->end - r->at));
    if (!nul) return NULL;
    const char *text = (const char *)r->at;
    r->at = nul + 1;
    return text;
}

/* Every text of the section; -1 when there are more than `most`, or the last has no end. */
static int take_texts(struct reader *r, const char **to, int most) {
    int count = 0;
    while (r->at < r->end) {
        const char *text = take_text(r);
        if (!text || count == most) return -1;
        to[count++] = text;
    }
    return count;
}

static bool all_absolute(const char **texts, int count) {
    for (int i = 0; i < count; i++)
        if (texts[i][0] != '/') return false;
    return true;
}

/* Whether they come in pairs, of which the first or the second is a path. */
static bool pairs(const char **texts, int count, int path) {
    for (int i = path; i < count; i += 2)
        if (texts[i][0] != '/') return false;
    return count >= 0 && count % 2 == 0;
}

static bool is_number(const char *text) {
    size_t length = strlen(text);
    return length && length < 20 && strspn(text, "0123456789") == length;
}

static bool read_upper(struct reader *r, struct upper *upper) {
    uint32_t kind;
    if (!take(r, &kind, 4) || !take(r, &upper->owned_by, 4)) return false;
    if (!(upper->size = take_text(r)) || !(upper->inodes = take_text(r)) || !(upper->path = take_text(r))) return false;
    if (kind == UPPER_TMPFS) {
        if (!is_number(upper->size) || !is_number(upper->inodes)) return false;
    } else if ((kind != UPPER_DIRECTORY && kind != UPPER_LOOP) || upper->path[0] != '/') return false;
    upper->kind = kind;
    return true;
}

static bool read_mount(struct reader *r, struct order *o) {
    static const uint32_t known = 0x1 | 0x2 | 0x4 | 0x8 | 0x400 | 0x800 | 0x200000 | 0x1000000; /* ro nosuid nodev noexec noatime nodiratime relatime strictatime */
    if (o->mount_count == MAX_MOUNTS) return false;
    struct mount_order *m = &o->mounts[o->mount_count];
    uint32_t zero;
    if (!take(r, &m->flags, 4) || !take(r, &zero, 4) || zero || m->flags & ~known) return false;
    if (!(m->fstype = take_text(r)) || !(m->source = take_text(r)) || !(m->target = take_text(r)) || !(m->data = take_text(r))) return false;
    if (strcmp(m->fstype, "proc") && strcmp(m->fstype, "devpts") && strcmp(m->fstype, "tmpfs") && strcmp(m->fstype, "sysfs")) return false;
    o->mount_count++;
    return m->target[0] == '/';
}

static bool read_rlimit(struct reader *r, struct order *o) {
    if (o->rlimit_count == MAX_RLIMITS) return false;
    struct rlimit_order *limit = &o->rlimits[o->rlimit_count++];
    uint32_t zero;
    return take(r, &limit->resource, 4) && take(r, &zero, 4) && !zero && take(r, &limit->soft, 8) && take(r, &limit->hard, 8) &&
           limit->resource < 16 && limit->soft <= limit->hard;
}

static bool read_ids(struct reader *r, struct order *o) {
    o->has_ids = true;
    return take(r, &o->base, 4) && take(r, &o->count, 4) && o->base && o->count && o->base <= UINT32_MAX - o->count;
}

static bool read_section(struct reader *r, int tag, const char **env, struct order *o) {
    /* NEWNS and NEWPID are not a choice; NEWUSER comes with the ids. */
    static const uint32_t known = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000, must = 0x20000 | 0x20000000;
    switch (tag) {
    case TAG_LOWERS: return take(r, &o->lowers, 4) && o->lowers >= 1 && o->lowers <= MAX_LOWERS;
    case TAG_IDS: return read_ids(r, o);
    case TAG_UPPER: return read_upper(r, &o->upper);
    case TAG_NAMESPACES: return take(r, &o->namespaces, 4) && !(o->namespaces & ~known) && (o->namespaces & must) == must;
    case TAG_HOSTNAME: return (o->hostname = take_text(r)) && strlen(o->hostname) <= 64;
    case TAG_ARGV: return (o->argc = take_texts(r, o->argv, MAX_ARGS)) > 0 && o->argv[0][0] == '/';
    case TAG_ENV: o->env = env; return (o->envc = take_texts(r, env, MAX_ENV)) >= 0;
    case TAG_MOUNT: return read_mount(r, o);
    case TAG_NODES: return (o->node_count = take_texts(r, o->nodes, MAX_NODES)) >= 0;
    case TAG_LINKS: return pairs(o->links, o->link_count = take_texts(r, o->links, 2 * MAX_LINKS), 1);
    case TAG_MASKED: return (o->masked_count = take_texts(r, o->masked, MAX_PATHS)) >= 0 && all_absolute(o->masked, o->masked_count);
    case TAG_READONLY: return (o->readonly_count = take_texts(r, o->readonly, MAX_PATHS)) >= 0 && all_absolute(o->readonly, o->readonly_count);
    case TAG_GROUPS: return (o->group_count = take_texts(r, o->groups, MAX_GROUPS)) >= 0 && all_absolute(o->groups, o->group_count);
    case TAG_GROUP2: return (o->group2 = take_text(r)) && o->group2[0] == '/';
    case TAG_RLIMIT: return read_rlimit(r, o);
    case TAG_CAPS: return take(r, &o->caps, 8);
    case TAG_NO_NEW_PRIVS: return take(r, &o->no_new_privs, 4) && o->no_new_privs <= 1;
    case TAG_SECCOMP: {
        size_t size = (size_t)(r->end - r->at);
        if (!size || size % 8 || size / 8 > MAX_FILTER) return false;
        o->filter = r->at;
        o->filter_length = (int)(size / 8);
        r->at = r->end;
        return true;
    }
    case TAG_MADE: return (o->made_count = take_texts(r, o->made, MAX_GROUPS)) >= 0 && all_absolute(o->made, o->made_count);
    case TAG_SETTINGS: return pairs(o->settings, o->setting_count = take_texts(r, o->settings, 2 * MAX_SETTINGS), 0);
    case TAG_SOCKET: return (o->socket = take_text(r)) && o->socket[0] == '/' && strlen(o->socket) < MAX_SOCKET;
    case TAG_OOM: o->has_oom = true; return take(r, &o->oom, 4) && o->oom >= -1000 && o->oom <= 1000;
    }
    return false;
}

bool parse_order(const uint8_t *data, size_t size, const char **env, struct order *order, const char **field, const char **why) {
    struct reader r = {data, data + size, field, why};
    uint32_t magic, total, zero, seen = 0;
    uint16_t version, sections;
    memset(order, 0, sizeof *order);
    if (!take(&r, &magic, 4) || !take(&r, &version, 2) || !take(&r, &sections, 2) || !take(&r, &total, 4) || !take(&r, &zero, 4))
        return refuse(&r, "frame", "cut");
    if (magic != FRAME_MAGIC) return refuse(&r, "magic", "not a frame");
    if (version != FRAME_VERSION) return refuse(&r, "version", "not a known version");
    if (total != size || size > MAX_FRAME || zero) return refuse(&r, "size", "not its own size");
    for (; sections; sections--) {
        uint16_t tag, none;
        uint32_t length;
        if (!take(&r, &tag, 2) || !take(&r, &none, 2) || !take(&r, &length, 4)) return refuse(&r, "sections", "cut");
        if (!tag || tag >= TAG_END || none) return refuse(&r, "tag", "unknown, and what is not understood is not enforced");
        if (length > (size_t)(r.end - r.at)) return refuse(&r, names[tag], "longer than the frame");
        if (seen & 1u << tag && tag != TAG_MOUNT && tag != TAG_RLIMIT) return refuse(&r, names[tag], "twice");
        seen |= 1u << tag;
        struct reader inner = {r.at, r.at + length, field, why};
        if (!read_section(&inner, tag, env, order) || inner.at != inner.end) return refuse(&r, names[tag], "malformed, too large or unknown");
        r.at += length;
    }
    if (r.at != r.end) return refuse(&r, "size", "something follows the last section");
    static const int needed[] = {TAG_LOWERS, TAG_UPPER, TAG_NAMESPACES, TAG_HOSTNAME, TAG_ARGV, TAG_ENV, TAG_CAPS, TAG_NO_NEW_PRIVS, TAG_SOCKET};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!(seen & 1u << needed[i])) return refuse(&r, names[needed[i]], "missing");
    if (order->filter && !order->no_new_privs) return refuse(&r, "no_new_privs", "a filter needs it");
    order->argv[order->argc] = NULL;
    env[order->envc] = NULL;
    return true;
}
