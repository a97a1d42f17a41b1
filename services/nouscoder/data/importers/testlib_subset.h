// What checkers use of testlib, the library of Codeforces for checkers: streams, readers, quit functions and helpers.
// It is written anew after the interface and the exit codes of github.com/MikeMirzayanov/testlib, not copied. An
// importer puts it in place of #include "testlib.h"; a testlib.h in the compiler's own folders comes first.
#if __has_include(<testlib.h>)
#include <testlib.h>
#else
#include <algorithm>
#include <cassert>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>
#include <unistd.h>

enum TResult { _ok = 0, _wa = 1, _pe = 2, _fail = 3, _dirt = 4, _points = 5, _unexpected_eof = 8, _partially = 16 };
enum TMode { _input, _output, _answer };
#define _pc(n) (TResult(_partially + (n)))
#define EOFC (255)

template <class C> inline bool isEof(C c) { return c == C(EOFC); }
template <class C> inline bool isEoln(C c) { return c == C('\n') || c == C('\r'); }
template <class C> inline bool isBlanks(C c) { return isEoln(c) || c == C(' ') || c == C('\t'); }

inline std::string testlib_vformat(const char *text, va_list list) {
    va_list again;
    va_copy(again, list);
    std::string made(std::max(0, vsnprintf(nullptr, 0, text, again)) + 1, '\0');
    va_end(again);
    vsnprintf(&made[0], made.size(), text, list);
    made.pop_back();
    return made;
}
#define TESTLIB_TEXT(text, made) \
    va_list list; \
    va_start(list, text); \
    std::string made = testlib_vformat(text, list); \
    va_end(list)
inline std::string testlib_format_(const char *text, ...) { TESTLIB_TEXT(text, made); return made; }
template <class... A> std::string format(const char *text, A &&...values) { return testlib_format_(text, values...); }
template <class... A> std::string format(const std::string &text, A &&...values) {
    return testlib_format_(text.c_str(), values...);
}
template <class T> std::string vtos(const T &value) {
    std::ostringstream out;
    return out << value, out.str();
}
template <class T> std::string toString(const T &value) { return vtos(value); }
template <class T> std::string toHumanReadableString(const T &value) { return vtos(value); }
inline std::string upperCase(std::string s) {
    for (char &c : s) if ('a' <= c && c <= 'z') c = char(c - 'a' + 'A');
    return s;
}
inline std::string lowerCase(std::string s) {
    for (char &c : s) if ('A' <= c && c <= 'Z') c = char(c - 'A' + 'a');
    return s;
}
inline std::string trim(const std::string &s) {
    size_t begin = 0, end = s.size();
    while (begin < end && isBlanks(s[begin])) begin++;
    while (begin < end && isBlanks(s[end - 1])) end--;
    return s.substr(begin, end - begin);
}
inline std::string compress(const std::string &s) {
    return s.size() <= 64 ? s : s.substr(0, 30) + "..." + s.substr(s.size() - 31);
}
inline std::string englishEnding(int x) {
    x %= 100;
    return x / 10 == 1 ? "th" : x % 10 == 1 ? "st" : x % 10 == 2 ? "nd" : x % 10 == 3 ? "rd" : "th";
}
inline std::vector<std::string> testlib_parts(const std::string &s, const std::string &separators, bool empty_too) {
    std::vector<std::string> found(1);
    for (char c : s) {
        if (separators.find(c) == std::string::npos) found.back() += c;
        else if (empty_too || !found.back().empty()) found.emplace_back();
    }
    if (!empty_too && found.back().empty()) found.pop_back();
    return found;
}
inline std::vector<std::string> split(const std::string &s, char c) { return testlib_parts(s, {c}, true); }
inline std::vector<std::string> split(const std::string &s, const std::string &c) { return testlib_parts(s, c, true); }
inline std::vector<std::string> tokenize(const std::string &s, char c) { return testlib_parts(s, {c}, false); }
inline std::vector<std::string> tokenize(const std::string &s, const std::string &c) {
    return testlib_parts(s, c, false);
}
template <class I, class S = char> std::string join(I first, I last, S separator = ' ') {
    std::ostringstream out;
    for (I at = first; at != last; ++at) (at == first ? out : out << separator) << *at;
    return out.str();
}
template <class C, class S = char> auto join(const C &all, S separator = ' ') -> decltype(all.begin(), std::string()) {
    return join(all.begin(), all.end(), separator);
}

inline bool doubleCompare(double expected, double result, double error) {
    error += 1E-15;
    if (std::isnan(expected)) return std::isnan(result);
    if (std::isinf(expected)) return std::isinf(result) && (expected > 0) == (result > 0);
    if (std::isnan(result) || std::isinf(result)) return false;
    if (std::fabs(result - expected) <= error) return true;
    double one = expected * (1.0 - error), other = expected * (1.0 + error);
    return std::min(one, other) <= result && result <= std::max(one, other);
}
inline double doubleDelta(double expected, double result) {
    double absolute = std::fabs(result - expected);
    return std::fabs(expected) > 1E-9 ? std::min(absolute, std::fabs(absolute / expected)) : absolute;
}

// A checker that ends without a call of a quit function has failed, as with testlib.
struct TestlibGuard {
    bool registered = false;
    ~TestlibGuard() {
        if (!registered) return;
        fprintf(stderr, "FAIL the checker ended without a quit function\n");
        _exit(3);
    }
};
static TestlibGuard testlib_guard;
static int testlib_case = 0;
inline void setTestCase(int number) { testlib_case = number; }
inline void unsetTestCase() { testlib_case = 0; }

// A pattern of testlib: characters, sets such as [^a-z], a|b, groups, and the counts * + ? {3} {1,5} after a character
// or a set. As there, a count takes as many characters as it can, {3,} is {3}, and a space needs a backslash.
class pattern {
    std::string text;

    // The place after the character, the set or the group at `i`.
    static size_t after(const std::string &p, size_t i) {
        if (p[i] == '\\') return std::min(i + 2, p.size());
        if (p[i] != '[' && p[i] != '(') return i + 1;
        char close = p[i] == '[' ? ']' : ')';
        for (i++; i < p.size() && p[i] != close;) i = close == ']' ? i + 1 + (p[i] == '\\') : after(p, i);
        return std::min(i + 1, p.size());
    }
    static std::vector<std::string> alternatives(const std::string &p) {
        std::vector<std::string> found;
        size_t begin = 0, i = 0;
        while (i < p.size()) {
            size_t next = after(p, i);
            if (p[i] == '|') found.push_back(p.substr(begin, i - begin)), begin = next;
            i = next;
        }
        return found.push_back(p.substr(begin)), found;
    }
    static bool holds(const std::string &set, char c) {
        if (set[0] != '[') return c == set[set[0] == '\\' && set.size() > 1];
        bool is_negated = set.size() > 2 && set[1] == '^', is_in = false;
        for (size_t i = 1 + is_negated; i + 1 < set.size(); i++) {
            i += set[i] == '\\';
            char least = set[i], most = least;
            if (i + 3 < set.size() && set[i + 1] == '-') most = set[i += 2];
            is_in |= least <= c && c <= most;
        }
        return is_in != is_negated;
    }
    static bool fits(const std::string &p, const std::string &s, size_t at) {
        std::vector<std::string> options = alternatives(p);
        if (options.size() > 1) {
            return std::any_of(options.begin(), options.end(), [&](const std::string &o) { return fits(o, s, at); });
        }
        if (p.empty()) return at == s.size();
        size_t end = after(p, 0), rest = end, least = 1, most = 1, taken = 0;
        if (p[0] == '(') {
            options = alternatives(p.substr(1, end - 2));
            auto fit = [&](const std::string &o) { return fits(o + p.substr(end), s, at); };
            return std::any_of(options.begin(), options.end(), fit);
        }
        char count = end < p.size() ? p[end] : ' ';
        if (count == '*' || count == '+' || count == '?') {
            rest++, least = count == '+', most = count == '?' ? 1 : s.size();
        } else if (count == '{') {
            rest = std::min(p.find('}', end), p.size() - 1) + 1;
            std::string inside = p.substr(end + 1, rest - end - 2);
            size_t comma = inside.find(',');
            least = strtoull(inside.c_str(), nullptr, 10), most = least;
            if (comma + 1 < inside.size() && comma + 1) most = strtoull(&inside[comma + 1], nullptr, 10);
        }
        std::string set = p.substr(0, end);
        while (taken < most && at + taken < s.size() && holds(set, s[at + taken])) taken++;
        return taken >= least && fits(p.substr(rest), s, at + taken);
    }

  public:
    pattern(const std::string &s) {
        for (size_t i = 0; i < s.size(); i++) {
            if (s[i] != ' ' || (i && s[i - 1] == '\\')) text += s[i];
        }
    }
    pattern(const char *s) : pattern(std::string(s)) {}
    bool matches(const std::string &s) const { return fits(text, s, 0); }
    std::string src() const { return text; }
};

struct InStream {
    TMode mode = _input;
    std::string name, data;
    size_t at = 0;
    bool strict = false;
    size_t maxTokenLength = 1 << 30, maxMessageLength = 32000;

    void init(const std::string &path, TMode given) {
        mode = given, name = path;
        std::ifstream file(path, std::ios::binary);
        if (!file) quit(mode == _output ? _pe : _fail, "cannot open the file " + path);
        data.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        if (mode == _output && data.compare(0, 3, "\xEF\xBB\xBF") == 0) at = 3;
    }
    void reset() { at = 0; }

    [[noreturn]] void quit(TResult result, const char *message) {
        static const char *const names[] = {"ok", "wrong answer", "wrong output format", "FAIL", "wrong output format",
                                            "points"};
        static const int codes[] = {0, 1, 2, 3, 2, 7};
        if (result == _unexpected_eof) result = _pe;
        if (mode != _output && result != _fail) result = _fail;
        if ((result == _ok || result == _points || result >= _partially) && !end_of_output()) {
            result = _dirt, message = "Extra information in the output file";
        }
        const char *title = result >= _partially ? "partially correct" : names[result];
        fprintf(stderr, "%s %.*s", title, int(std::min<size_t>(maxMessageLength, strlen(message))), message);
        fprintf(stderr, testlib_case ? " (test case %d)\n" : "\n", testlib_case);
        fflush(stdout), fflush(stderr);
        _exit(result >= _partially ? result - _partially : codes[result]);
    }
    [[noreturn]] void quit(TResult result, const std::string &message) { quit(result, message.c_str()); }
    [[noreturn]] void quitf(TResult result, const char *text, ...) { TESTLIB_TEXT(text, made); quit(result, made); }
    void quitif(bool condition, TResult result, const char *text, ...) {
        TESTLIB_TEXT(text, made);
        if (condition) quit(result, made);
    }
    void ensuref(bool condition, const char *text, ...) {
        TESTLIB_TEXT(text, made);
        if (!condition) quit(_wa, made);
    }

    int peek() const { return at < data.size() ? (unsigned char)data[at] : EOFC; }
    int take() { int c = peek(); at += at < data.size(); return c; }
    char curChar() { return char(peek()); }
    char nextChar() { return char(take()); }
    char readChar() { return nextChar(); }
    char readChar(char wanted) {
        char found = nextChar();
        if (found != wanted) quitf(_pe, "Unexpected character #%d, but #%d expected", int(found), int(wanted));
        return found;
    }
    char readSpace() { return readChar(' '); }
    void skipChar() { take(); }
    void unreadChar(char) { at -= at > 0; }
    void skipBlanks() { while (at < data.size() && isBlanks(data[at])) at++; }
    bool eof() { return at >= data.size(); }
    bool seekEof() { return skipBlanks(), eof(); }
    bool eoln() {
        if (eof()) return !strict;
        size_t size = data[at] == '\n' ? 1 : data.compare(at, 2, "\r\n") == 0 ? 2 : 0;
        return at += size, size > 0;
    }
    bool seekEoln() {
        while (at < data.size() && (data[at] == ' ' || data[at] == '\t')) at++;
        return eoln();
    }
    void readEoln() { if (!eoln()) quit(_pe, "Expected EOLN"); }
    void readEof() { if (!eof()) quit(_pe, "Expected EOF"); }
    void nextLine() { readLine(); }

    std::string readToken() {
        if (!strict) skipBlanks();
        if (eof()) quit(_unexpected_eof, "Unexpected end of file - token expected");
        size_t begin = at;
        while (at < data.size() && !isBlanks(data[at])) at++;
        if (at == begin) quit(_pe, "Unexpected white-space - token expected");
        if (at - begin > maxTokenLength) quit(_pe, "a token is too long");
        return data.substr(begin, at - begin);
    }
    std::string readLine() {
        size_t begin = at, end = std::min(data.find('\n', at), data.size());
        at = end;
        if (end > begin && end < data.size() && data[end - 1] == '\r') end--;
        std::string line = data.substr(begin, end - begin);
        strict ? readEoln() : void(eoln());
        return line;
    }
    std::string readToken(const pattern &p, const std::string &of = "") { return matched(readToken(), p, of); }
    std::string readLine(const pattern &p, const std::string &of = "") { return matched(readLine(), p, of); }
    template <class... A> std::string readWord(A &&...more) { return readToken(more...); }
    template <class... A> std::string readString(A &&...more) { return readLine(more...); }
    template <class... A> void readTokenTo(std::string &to, A &&...more) { to = readToken(more...); }
    template <class... A> void readWordTo(std::string &to, A &&...more) { to = readToken(more...); }
    template <class... A> void readLineTo(std::string &to, A &&...more) { to = readLine(more...); }
    template <class... A> void readStringTo(std::string &to, A &&...more) { to = readLine(more...); }

    long long readLong() { return integer(readToken()); }
    unsigned long long readUnsignedLong() {
        std::string token = readToken();
        bool is_wrong = token.empty() || token.size() > 20 || (token[0] == '0' && token.size() > 1);
        for (char c : token) is_wrong |= c < '0' || c > '9';
        errno = 0;
        unsigned long long value = strtoull(token.c_str(), nullptr, 10);
        if (is_wrong || errno) unexpected("unsigned integer", token);
        return value;
    }
    int readInt() {
        std::string token = readToken();
        long long value = integer(token);
        if (value < INT_MIN || value > INT_MAX) unexpected("int32", token);
        return int(value);
    }
    double readDouble() { return number(readToken()); }
    long long readLong(long long least, long long most, const std::string &of = "", int = 1) {
        return within(readLong(), least, most, of);
    }
    typedef unsigned long long Unsigned;
    Unsigned readUnsignedLong(Unsigned least, Unsigned most, const std::string &of = "", int = 1) {
        return within(readUnsignedLong(), least, most, of);
    }
    int readInt(int least, int most, const std::string &of = "", int = 1) { return within(readInt(), least, most, of); }
    double readDouble(double least, double most, const std::string &of = "", int = 1) {
        return within(readDouble(), least, most, of);
    }
    double readStrictDouble(double least, double most, int digits, int most_digits, const std::string &of = "") {
        std::string token = readToken();
        size_t point = token.find('.');
        int after = point == std::string::npos ? 0 : int(token.size() - point) - 1;
        double value = number(token);
        size_t first = token[0] == '-';
        bool has_zero = token[first] == '0' && isdigit(token[first + 1]);
        bool is_plain = isdigit(token[first]) && isdigit(token.back());
        is_plain &= token.find_first_not_of("0123456789.", first) == std::string::npos;
        bool is_wrong = after < digits || after > most_digits || (token[0] == '-' && value >= 0);
        if (is_wrong || !is_plain || has_zero || token.size() > 1000) unexpected("strict double", token);
        return within(value, least, most, of);
    }
    template <class... A> int readInteger(A... more) { return readInt(more...); }
    template <class... A> double readReal(A &&...more) { return readDouble(more...); }
    template <class... A> double readStrictReal(A &&...more) { return readStrictDouble(more...); }

#define TESTLIB_MANY(type, many, one) \
    template <class... A> std::vector<type> many(int size, A &&...more) { \
        std::vector<type> found; \
        for (int i = 0; i < size; i++) { \
            if (strict && i) readSpace(); \
            found.push_back(one(more...)); \
        } \
        return found; \
    }
    TESTLIB_MANY(long long, readLongs, readLong)
    TESTLIB_MANY(unsigned long long, readUnsignedLongs, readUnsignedLong)
    TESTLIB_MANY(int, readInts, readInt)
    TESTLIB_MANY(int, readIntegers, readInt)
    TESTLIB_MANY(double, readDoubles, readDouble)
    TESTLIB_MANY(double, readReals, readDouble)
#undef TESTLIB_MANY
    std::vector<std::string> readTokens(int size) { return texts(size, false); }
    std::vector<std::string> readWords(int size) { return texts(size, false); }
    std::vector<std::string> readLines(int size) { return texts(size, true); }
    std::vector<std::string> readStrings(int size) { return texts(size, true); }
    std::vector<std::string> readTokens(int size, const pattern &p, const std::string &of = "", int = 1) {
        return texts(size, false, &p, of);
    }
    std::vector<std::string> readWords(int size, const pattern &p, const std::string &of = "", int = 1) {
        return texts(size, false, &p, of);
    }
    std::vector<std::string> readLines(int size, const pattern &p, const std::string &of = "", int = 1) {
        return texts(size, true, &p, of);
    }

    long long integer(const std::string &token) {
        bool is_negative = token.size() > 1 && token[0] == '-';
        std::string digits = token.substr(is_negative);
        bool is_wrong = token.empty() || token.size() > 20 || (digits[0] == '0' && (digits.size() > 1 || is_negative));
        for (char c : digits) is_wrong |= c < '0' || c > '9';
        errno = 0;
        long long value = strtoll(token.c_str(), nullptr, 10);
        if (is_wrong || errno) unexpected("integer", token);
        return value;
    }
    double number(const std::string &token) {
        char *end = nullptr;
        double value = strtod(token.c_str(), &end);
        bool has_digit = token.find_first_of("0123456789") != std::string::npos;
        bool is_plain = token.find_first_not_of("0123456789.eE+-") == std::string::npos;
        if (!has_digit || !is_plain || end != token.c_str() + token.size()) unexpected("double", token);
        return value;
    }

  private:
    bool end_of_output();
    [[noreturn]] void unexpected(const char *what, const std::string &token) {
        quitf(_pe, "Expected %s, but \"%s\" found", what, compress(token).c_str());
    }
    template <class T> T within(T value, T least, T most, const std::string &of) {
        if (value < least || value > most) quit(_wa, of + " equals to " + vtos(value) + ", violates the range");
        return value;
    }
    std::string matched(const std::string &found, const pattern &p, const std::string &of) {
        if (!p.matches(found)) quit(_wa, of + " \"" + compress(found) + "\" doesn't correspond to pattern " + p.src());
        return found;
    }
    std::vector<std::string> texts(int size, bool lines, const pattern *p = nullptr, const std::string &of = "") {
        std::vector<std::string> found;
        for (int i = 0; i < size; i++) {
            if (strict && i && !lines) readSpace();
            std::string one = lines ? readLine() : readToken();
            found.push_back(p ? matched(one, *p, of) : one);
        }
        return found;
    }
};

static InStream inf, ouf, ans;
inline bool InStream::end_of_output() { return ouf.seekEof(); }

[[noreturn]] inline void quit(TResult result, const std::string &message) { ouf.quit(result, message); }
[[noreturn]] inline void quits(TResult result, const std::string &message) { ouf.quit(result, message); }
[[noreturn]] inline void quitf(TResult result, const char *text, ...) {
    TESTLIB_TEXT(text, made);
    ouf.quit(result, made);
}
inline void quitif(bool condition, TResult result, const char *text, ...) {
    TESTLIB_TEXT(text, made);
    if (condition) ouf.quit(result, made);
}
[[noreturn]] inline void quitp(double points, const std::string &message = "") {
    if (!(-1E-8 <= points && points <= 1E6)) ouf.quit(_fail, "Parameter 'points' must be from 0 to 1E6");
    ouf.quit(_points, testlib_format_("%.10g ", points) + message);
}
template <class A, class... B> [[noreturn]] void quitp(double points, const char *text, A first, B... more) {
    quitp(points, testlib_format_(text, first, more...));
}
template <class T>
[[noreturn]] void expectedButFound(TResult result, T expected, T found, const char *text = "", ...) {
    TESTLIB_TEXT(text, made);
    ouf.quit(result, made + (made.empty() ? "E" : ", e") + "xpected: " + vtos(expected) + ", found: " + vtos(found));
}
inline void ensuref(bool condition, const char *text, ...) {
    TESTLIB_TEXT(text, made);
    if (!condition) ouf.quit(_fail, made);
}
#define ensure(condition) ensuref((condition), "Condition failed: \"%s\"", #condition)
#define ensure_ext(condition) ensure(condition)

inline void setName(const char *, ...) {}
inline void disableFinalizeGuard() { testlib_guard.registered = false; }
inline void registerTestlibCmd(int count, char *arguments[]) {
    if (count < 4) quit(_fail, "the arguments are: input output answer");
    testlib_guard.registered = true;
    inf.init(arguments[1], _input), ouf.init(arguments[2], _output), ans.init(arguments[3], _answer);
}
inline long long stringToLongLong(InStream &in, const std::string &token) { return in.integer(token); }
inline double stringToDouble(InStream &in, const std::string &token) { return in.number(token); }

struct random_t {
    std::mt19937_64 engine{905};
    template <class T> T next(T most) { return next(T(0), T(most - 1)); }
    template <class T> T next(T least, T most) { return T(least + T(engine() % uint64_t(most - least + 1))); }
    double next() { return double(engine() >> 11) / 9007199254740992.0; }
    void setSeed(long long seed) { engine.seed(seed); }
};
static random_t rnd;
template <class I> void shuffle(I first, I last) {
    for (I at = first; at != last; ++at) std::iter_swap(at, first + rnd.next(int(at - first) + 1));
}
#endif
