/*
 * Which bytes of a blob belong together, by the metadata image (EROFS, Linux fs/erofs/erofs_fs.h): a large file is a unit, and so are the
 * small files of one directory. A hint for reading ahead: what cannot be understood is left out. Nothing of the image is trusted.
 */
#include <stddef.h>
#include <stdint.h>

extern void *malloc(size_t);
extern void free(void *), qsort(void *, size_t, size_t, int (*)(const void *, const void *));
extern int close(int), open_by_handle_at(int, void *, int), name_to_handle_at(int, const char *, void *, int *, int);
extern long readahead(int, int64_t, size_t);

enum { SUPER = 1024, DIRENT = 12, PLAIN = 0, INLINE = 2, CHUNKED = 4, WITH_INDEX = 0x20, PROGRAM = 1, DIRECTORY = 2, CLOEXEC = 02000000, EMPTY_PATH = 0x1000 };
enum { MOST = 128 * 1024 }; /* readahead(2) takes no more at once (ra_pages) */
enum { TYPE = 0170000, REGULAR = 0100000, FOLDER = 0040000 };

/* Shared with Python (`units.py`). */
struct extent {
	uint64_t start, end;
	uint32_t unit, flags; /* PROGRAM: a large one that the dynamic loader may map; DIRECTORY: of small files */
	uint64_t nid, at;     /* of the first file of it, and where in that file it begins */
};

struct image {
	const uint8_t *data;
	uint64_t size, meta;
	uint32_t bits;
	uint64_t *folders; /* nids of those found so far */
	uint64_t found, room;
	struct extent *out;
	uint64_t count, most, big;
	uint64_t steps; /* that are left: an image that goes in circles ends here, an honest one needs far fewer than it has bytes */
};

struct inode {
	uint64_t size, tail;
	uint32_t mode, start, layout;
};

static uint64_t get(const struct image *image, uint64_t at, int bytes)
{
	uint64_t value = 0;
	if (at + (uint64_t)bytes > image->size || at > image->size)
		return 0;
	__builtin_memcpy(&value, image->data + at, (size_t)bytes); /* both architectures are little-endian, as EROFS is */
	return value;
}

static int inode(const struct image *image, uint64_t nid, struct inode *out)
{
	uint64_t at = image->meta + nid * 32;
	if (nid >= image->size / 32 || at + 64 > image->size)
		return 0;
	uint32_t format = (uint32_t)get(image, at, 2), xattrs = (uint32_t)get(image, at + 2, 2);
	out->layout = format >> 1 & 7;
	out->mode = (uint32_t)get(image, at + 4, 2);
	out->size = get(image, at + 8, format & 1 ? 8 : 4);
	out->start = (uint32_t)get(image, at + 16, 4);
	out->tail = at + (format & 1 ? 64 : 32) + (xattrs ? 12 + 4 * ((uint64_t)xattrs - 1) : 0);
	return 1;
}

static void file(struct image *image, const struct inode *found, uint64_t nid, uint32_t folder, uint32_t number, int program)
{
	if (found->layout != CHUNKED || !(found->start & WITH_INDEX) || !found->size)
		return;
	uint32_t shift = image->bits + (found->start & 0x1F), large = found->size > image->big;
	uint64_t at = (found->tail + 7) & ~7ULL, size = found->size;
	struct extent *last = NULL;
	for (uint64_t begin = 0; shift < 48 && begin < size && image->steps; begin += 1ULL << shift, at += 8) {
		image->steps--;
		uint32_t block = (uint32_t)get(image, at + 4, 4);
		uint64_t start = (uint64_t)block << image->bits, length = size - begin < 1ULL << shift ? size - begin : 1ULL << shift;
		if (at + 8 > image->size)
			return;
		if (block == UINT32_MAX || !get(image, at + 2, 2)) /* a hole, or no other device's */
			continue;
		if (last && last->end == start) {
			last->end += length;
			continue;
		}
		if (image->count == image->most)
			return;
		last = &image->out[image->count++];
		*last = (struct extent){start, start + length, large ? number : folder, large ? (program ? PROGRAM : 0) : DIRECTORY, nid, begin};
	}
}

static int names_library(const struct image *image, uint64_t at, uint64_t end)
{
	for (; at + 3 <= end; at++)
		if (image->data[at] == '.' && image->data[at + 1] == 's' && image->data[at + 2] == 'o')
			return 1;
	return 0;
}

static void block(struct image *image, uint64_t at, uint64_t length, uint32_t folder, uint32_t *units)
{
	image->steps--;
	if (at > image->size || length > image->size - at)
		return;
	uint64_t names = get(image, at + 8, 2);
	for (uint64_t entry = 0; entry + DIRENT <= names && names <= length && image->steps; entry += DIRENT) {
		image->steps--;
		uint64_t nid = get(image, at + entry, 8), name = get(image, at + entry + 8, 2);
		uint64_t end = entry + 2 * DIRENT <= names ? get(image, at + entry + DIRENT + 8, 2) : length;
		struct inode found;
		if (name < names || end <= name || end > length || !inode(image, nid, &found))
			continue;
		if ((found.mode & TYPE) == REGULAR)
			file(image, &found, nid, folder, (*units)++, (found.mode & 0111) || names_library(image, at + name, at + end));
		else if ((found.mode & TYPE) == FOLDER && image->data[at + name] != '.' && image->found < image->room)
			image->folders[image->found++] = nid;
		else if ((found.mode & TYPE) == FOLDER && end - name > 2 && image->data[at + name + 2] && image->found < image->room)
			image->folders[image->found++] = nid; /* a name that begins with a dot, but is neither "." nor ".." */
	}
}

static int by_start(const void *left, const void *right)
{
	const struct extent *a = left, *b = right;
	return a->start != b->start ? (a->start < b->start ? -1 : 1) : a->end != b->end ? (a->end < b->end ? -1 : 1) : 0;
}

/*
 * Fills ``out`` with at most ``most`` extents of the blob, in order, neighbours of one unit joined; returns how many. Files above ``big``
 * bytes are units of their own.
 */
int64_t files_read(const uint8_t *data, uint64_t size, uint64_t big, struct extent *out, uint64_t most)
{
	struct image image = {.data = data, .size = size, .out = out, .most = most, .big = big, .steps = size};
	uint64_t kept = 0;
	if (size < SUPER + 128 || get(&image, SUPER, 4) != 0xE0F5E1E2)
		return -1;
	image.bits = (uint32_t)get(&image, SUPER + 12, 1);
	if (image.bits < 9 || image.bits > 16)
		return -1;
	image.meta = get(&image, SUPER + 40, 4) << image.bits;
	image.room = size / 32; /* no image has more inodes: one that goes in circles ends here too */
	image.folders = malloc(image.room * sizeof *image.folders);
	if (!image.folders)
		return -1;
	image.folders[image.found++] = get(&image, SUPER + 14, 2);
	uint32_t units = 0;
	for (uint64_t next = 0; next < image.found; next++) {
		struct inode found;
		uint64_t step = 1ULL << image.bits;
		uint32_t folder = units++;
		if (!inode(&image, image.folders[next], &found) || (found.layout != PLAIN && found.layout != INLINE) || found.size > size)
			continue;
		uint64_t whole = found.layout == INLINE ? found.size & ~(step - 1) : found.size;
		for (uint64_t at = 0; at < whole && image.steps; at += step)
			block(&image, ((uint64_t)found.start << image.bits) + at, whole - at < step ? whole - at : step, folder, &units);
		if (whole < found.size && image.steps)
			block(&image, found.tail, found.size - whole, folder, &units);
	}
	free(image.folders);
	qsort(out, image.count, sizeof *out, by_start);
	for (uint64_t next = 0; next < image.count; next++) {
		if (kept && out[next].start < out[kept - 1].end && out[next].end <= out[kept - 1].end)
			continue; /* two names of one file, or two files with the same content */
		if (kept && out[kept - 1].unit == out[next].unit && out[next].start - out[kept - 1].end < 1ULL << image.bits)
			out[kept - 1].end = out[next].end;
		else
			out[kept++] = out[next];
	}
	return (int64_t)kept;
}

struct handle { /* file_handle */
	uint32_t bytes;
	int32_t type;
	uint32_t word[8];
};

/* A file by its nid, as this kernel names EROFS's: FILEID_INO64_GEN since Linux 6.16, FILEID_INO32_GEN before; -1 when it is neither. */
static int open_file(int mount, int type, uint64_t nid)
{
	struct handle long_one = {12, 0x81, {(uint32_t)(nid >> 32), (uint32_t)nid}}, short_one = {8, 1, {(uint32_t)nid}};
	if (type == long_one.type)
		return open_by_handle_at(mount, &long_one, CLOEXEC);
	return type == short_one.type && nid <= UINT32_MAX ? open_by_handle_at(mount, &short_one, CLOEXEC) : -1;
}

/*
 * Have the kernel read the bytes ``start`` to ``end`` of the blob through the image's mount: afterwards whoever reads those files finds them in
 * memory. ``extents`` are files_read's with ``big`` 0, so each is of one file. Pieces below ``least`` bytes are not worth their opening.
 * Returns how many bytes were asked for.
 */
int64_t files_warm(int mount, const struct extent *extents, uint64_t count, uint64_t start, uint64_t end, uint64_t least)
{
	struct handle top = {sizeof top.word, 0, {0}};
	uint64_t low = 0, high = count;
	int64_t asked = 0;
	int id;
	if (name_to_handle_at(mount, "", &top, &id, EMPTY_PATH))
		return 0;
	while (low < high) { /* the first that ends behind start */
		uint64_t middle = low + (high - low) / 2;
		if (extents[middle].end <= start)
			low = middle + 1;
		else
			high = middle;
	}
	for (; low < count && extents[low].start < end; low++) {
		uint64_t from = extents[low].start > start ? extents[low].start : start, to = extents[low].end < end ? extents[low].end : end;
		int fd = to > from && to - from >= least ? open_file(mount, top.type, extents[low].nid) : -1;
		if (fd < 0)
			continue;
		for (uint64_t at = from; at < to; at += MOST)
			readahead(fd, (int64_t)(extents[low].at + at - extents[low].start), to - at < MOST ? to - at : MOST);
		close(fd);
		asked += (int64_t)(to - from);
	}
	return asked;
}
